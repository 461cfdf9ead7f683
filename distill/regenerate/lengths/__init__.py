"""Prediction of answer lengths, and batches of requests by predicted length."""
