"""The command line: one file per command. Units other than SI only here."""
