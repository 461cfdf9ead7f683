"""The command `outrider`, and the pipeline behind `train.py`."""
