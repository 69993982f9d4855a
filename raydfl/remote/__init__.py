"""Runs and recordings behind a URI (``file://``, ``s3://``, ``gs://``): copied to a local folder, worked on there, copied back."""
