"""A plugin that misbehaves: see the README."""
