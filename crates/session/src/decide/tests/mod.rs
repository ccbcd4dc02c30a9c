//! The promises of the decision: by example, then in stories in which the server crashes, connections
//! break and everything fails at any moment.

mod examples;
mod going_back;
mod resting;
mod stories;
mod world;
