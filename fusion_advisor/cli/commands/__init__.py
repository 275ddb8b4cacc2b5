"""The commands: a module takes options, calls the package and tells the user."""
