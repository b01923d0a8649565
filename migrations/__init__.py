"""Alembic migrations, run when the daemon starts."""
