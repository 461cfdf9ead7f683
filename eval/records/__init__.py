"""Files of a run: one JSON line for each answer, and the settings that the answers depend on."""
