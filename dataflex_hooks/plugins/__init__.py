"""The built-in mechanism plugins, found through entry points and written with public names, as any other plugin."""
