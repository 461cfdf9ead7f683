"""A target in stages: processes that have some of its layers each, and pass hidden states on."""
