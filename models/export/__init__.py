"""Export of drafters to the formats of other programs, and to the Hub."""
