//! Pull requests; and the local forge for those without an account.
