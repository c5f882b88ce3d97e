"""What commands share: files, problems, tables, errors, how a command is started again on ranks."""
