"""What would hang or train wrongly, found before the job starts: the checks behind `doctor`."""
