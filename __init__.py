"""The folders beside this file are the packages of outrider."""
