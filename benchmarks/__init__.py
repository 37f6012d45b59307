"""What the project costs, measured on its real parts; one program a bar."""
