"""What the commands of ``dataflex`` do."""
