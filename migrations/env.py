"""How Alembic runs here: on the connection `server.db.migrate` hands over."""

from alembic import context

from server.db.models import Base

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
