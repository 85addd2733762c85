"""Small files that mean harm, one per idea, and the script that makes them. See README.md."""
