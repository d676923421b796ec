"""What proves a store or a handler: contract suites, real servers, faults, checkers. Shipped, for others to use."""
