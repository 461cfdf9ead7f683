"""Distil, train and evaluate a drafter as a recipe says.

accelerate launch train.py conf=demo
accelerate launch train.py conf=redrafter_vicuna7b stages=[distill] data.limit=1000
"""

from outrider.cli.compose import main

if __name__ == "__main__":
    main()
