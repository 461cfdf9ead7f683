"""What runs the target while it regenerates answers, one engine a file."""
