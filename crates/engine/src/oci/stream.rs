//! A stream that is counted and hashed while somebody else reads it.

use std::{
    cell::RefCell,
    io::{self, Read},
    rc::Rc,
};

use ring::digest::{Context, SHA256};

use super::reference::Digest;

/// What has passed so far.
#[derive(Clone)]
pub(super) struct Tally(Rc<RefCell<Counted>>);

struct Counted {
    hash: Context,
    bytes: u64,
    broke: Option<io::Error>,
}

impl Tally {
    pub(super) fn new() -> Self {
        Self(Rc::new(RefCell::new(Counted { hash: Context::new(&SHA256), bytes: 0, broke: None })))
    }

    pub(super) fn bytes(&self) -> u64 {
        self.0.borrow().bytes
    }

    pub(super) fn digest(&self) -> Digest {
        Digest::from_hash(self.0.borrow().hash.clone().finish())
    }

    /// The error the source itself ended with, if it did; whoever reads may have made another of it.
    pub(super) fn broke(&self) -> Option<io::Error> {
        self.0.borrow_mut().broke.take()
    }
}

/// Counts and hashes what is read through it.
pub(super) struct Counting<R> {
    source: R,
    tally: Tally,
}

impl<R: Read> Counting<R> {
    pub(super) fn new(source: R, tally: &Tally) -> Self {
        Self { source, tally: tally.clone() }
    }
}

impl<R: Read> Read for Counting<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.source.read(buffer);
        let mut counted = self.tally.0.borrow_mut();
        match read {
            Ok(length) => {
                counted.hash.update(&buffer[..length]);
                counted.bytes += length as u64;
                Ok(length)
            }
            Err(error) => {
                counted.broke = Some(io::Error::new(error.kind(), error.to_string()));
                Err(error)
            }
        }
    }
}
