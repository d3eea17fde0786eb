"""Makes `support` importable from every test folder: pytest puts the folder of a conftest file on the path."""
