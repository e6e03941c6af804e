"""The processes of one router (`--router-processes`): what each tells the others, and how that adds up."""
