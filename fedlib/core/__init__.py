"""Values that everything else is made of: experiments and their validation, slices, clients, storage, generators."""
