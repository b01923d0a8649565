"""All SQL, one file per subject."""
