"""The contestants that raydfl is measured against, and the work that all of them do."""
