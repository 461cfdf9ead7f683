"""What runs the target for regeneration, one engine a module."""
