"""What proves a backend or a handler: contract suites, real servers, faults, checkers. Shipped, so that others can use it."""
