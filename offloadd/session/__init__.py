"""Who is connected and what they own: jobs, sessions, budgets, arenas, credentials, and the attach handshake.

Called by `offloadd.control`. Never moves a tile's bytes and never calls another room.
"""
