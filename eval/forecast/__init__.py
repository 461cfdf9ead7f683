"""What a drafter will be worth, before it is trained: measurements on prompts, and a learning curve."""
