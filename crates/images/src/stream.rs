//! Readers that count, hash and report a stream while another component reads it.

use std::{
    cell::RefCell,
    io::{self, Read},
    rc::Rc,
    time::Instant,
};

use harvest_proto::api::ImageLine;
use ring::digest::{Context, Digest, SHA256};

// Often enough for a moving progress bar.
const REPORT_BYTES: u64 = 1 << 20;

/// The hexadecimal digits of a digest.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Milliseconds since a step started.
pub(crate) fn elapsed_millis(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// Count and digest of the bytes read so far, shared with the reader.
#[derive(Clone)]
pub(crate) struct StreamStats(Rc<RefCell<Counters>>);

struct Counters {
    hash: Context,
    bytes: u64,
    error: Option<io::Error>,
}

impl StreamStats {
    pub(crate) fn new() -> Self {
        Self(Rc::new(RefCell::new(Counters { hash: Context::new(&SHA256), bytes: 0, error: None })))
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.0.borrow().bytes
    }

    pub(crate) fn hash(&self) -> Digest {
        self.0.borrow().hash.clone().finish()
    }

    /// The error of the source itself, if it failed. The reader may have wrapped or replaced it.
    pub(crate) fn take_error(&self) -> Option<io::Error> {
        self.0.borrow_mut().error.take()
    }
}

/// Counts and hashes the bytes that are read through it.
pub(crate) struct CountingReader<R> {
    source: R,
    stats: StreamStats,
}

impl<R: Read> CountingReader<R> {
    pub(crate) fn new(source: R, stats: &StreamStats) -> Self {
        Self { source, stats: stats.clone() }
    }
}

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.source.read(buffer);
        let mut counters = self.stats.0.borrow_mut();
        match &read {
            Ok(length) => {
                counters.hash.update(&buffer[..*length]);
                counters.bytes += *length as u64;
            }
            Err(error) => {
                counters.error = Some(io::Error::new(error.kind(), error.to_string()));
            }
        }
        read
    }
}

/// Reports how many bytes have been read through it.
pub(crate) struct ReportingReader<'a, R> {
    source: R,
    done: u64,
    reported: u64,
    total: Option<u64>,
    progress: &'a mut dyn FnMut(ImageLine),
}

impl<'a, R: Read> ReportingReader<'a, R> {
    pub(crate) fn new(
        source: R,
        total: Option<u64>,
        progress: &'a mut dyn FnMut(ImageLine),
    ) -> Self {
        Self { source, done: 0, reported: 0, total, progress }
    }
}

impl<R: Read> Read for ReportingReader<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.source.read(buffer)?;
        self.done += length as u64;
        if self.done >= self.reported + REPORT_BYTES {
            self.reported = self.done;
            (self.progress)(ImageLine::Bytes { done: self.done, total: self.total });
        }
        Ok(length)
    }
}
