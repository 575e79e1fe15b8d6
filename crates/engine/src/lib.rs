//! What happens to a request.

pub mod backend;
