"""How drafters with attention are trained: branches behind positions of a text."""
