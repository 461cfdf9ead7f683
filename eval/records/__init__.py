"""Files of a run: a JSON line for each answer, and the settings that answers depend on."""
