"""What the engines of both workers do with requests, whatever their steps compute."""
