"""Report of finished evaluations as one HTML page, and the model card."""
