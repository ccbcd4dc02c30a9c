//! Tests of captures, saves and comparisons on real overlay mounts, in mount namespaces of their
//! own.

mod captures;
mod comparisons;
mod edits;
mod saves;
mod test_disk;
