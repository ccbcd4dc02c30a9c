//! Counts and hashes a stream while another component reads it.

use std::{
    cell::RefCell,
    io::{self, Read},
    rc::Rc,
};

use ring::digest::{Context, SHA256};

use super::reference::Digest;

/// Count and digest of the bytes read so far, shared with the reader.
#[derive(Clone)]
pub(super) struct StreamStats(Rc<RefCell<Counters>>);

struct Counters {
    hash: Context,
    bytes: u64,
    error: Option<io::Error>,
}

impl StreamStats {
    pub(super) fn new() -> Self {
        Self(Rc::new(RefCell::new(Counters { hash: Context::new(&SHA256), bytes: 0, error: None })))
    }

    pub(super) fn bytes(&self) -> u64 {
        self.0.borrow().bytes
    }

    pub(super) fn digest(&self) -> Digest {
        Digest::from_hash(self.0.borrow().hash.clone().finish())
    }

    /// The error of the source itself, if it failed. The reader may have wrapped or replaced it.
    pub(super) fn take_error(&self) -> Option<io::Error> {
        self.0.borrow_mut().error.take()
    }
}

/// Counts and hashes the bytes that are read through it.
pub(super) struct CountingReader<R> {
    source: R,
    stats: StreamStats,
}

impl<R: Read> CountingReader<R> {
    pub(super) fn new(source: R, stats: &StreamStats) -> Self {
        Self { source, stats: stats.clone() }
    }
}

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.source.read(buffer);
        let mut counters = self.stats.0.borrow_mut();
        match read {
            Ok(length) => {
                counters.hash.update(&buffer[..length]);
                counters.bytes += length as u64;
                Ok(length)
            }
            Err(error) => {
                counters.error = Some(io::Error::new(error.kind(), error.to_string()));
                Err(error)
            }
        }
    }
}
