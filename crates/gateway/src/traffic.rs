//! Counts a door's connections and their bytes for the network log. The counts of a moment are
//! stored together, so a busy sandbox causes few writes.

use std::{
    collections::BTreeMap,
    io,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::SystemTime,
};

use harvest_proto::{NetworkVerdict, Timestamp, TrafficCount};
use tokio::io::{AsyncBufRead, AsyncRead, AsyncWrite, ReadBuf};

// Names that a sandbox can make a door keep until the next write; further ones share `*`. Refused
// ones, which cost nothing, must not hide those that it connects to.
const MAX_ALLOWED: usize = 256;
const MAX_REFUSED: usize = 64;

// Beyond this number, connections that have ended are counted before the next write.
const MAX_OPEN: usize = 1024;

/// The name of connections whose own names are too many.
const OTHERS: &str = "*";

/// A name, a port and what was decided.
type Key = (String, u16, NetworkVerdict);

#[derive(Debug, Default)]
pub(crate) struct Traffic(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    closed: BTreeMap<Key, Count>,
    open: Vec<(Key, Arc<Bytes>)>,
}

#[derive(Debug, Clone, Copy)]
struct Count {
    /// The log says in which turn that was.
    at: Timestamp,
    connections: u64,
    sent: u64,
    received: u64,
}

/// The bytes of an open connection that are not stored yet.
#[derive(Debug, Default)]
pub(crate) struct Bytes {
    sent: AtomicU64,
    received: AtomicU64,
}

impl Traffic {
    /// Counts a refused connection or look-up.
    pub(crate) fn refused(&self, name: &str, port: u16) {
        self.lock().count((name.to_owned(), port, NetworkVerdict::Refused)).connections += 1;
    }

    /// Counts a connection, and its bytes for as long as they are held.
    pub(crate) fn connected(&self, name: &str, port: u16) -> Arc<Bytes> {
        let bytes = Arc::new(Bytes::default());
        let mut counts = self.lock();
        if counts.open.len() >= MAX_OPEN {
            counts.collect();
        }
        let key = counts.key((name.to_owned(), port, NetworkVerdict::Allowed));
        counts.count(key.clone()).connections += 1;
        counts.open.push((key, Arc::clone(&bytes)));
        bytes
    }

    /// Removes and returns what was counted since the last call.
    pub(crate) fn take(&self) -> Vec<TrafficCount> {
        let mut counts = self.lock();
        counts.collect();
        std::mem::take(&mut counts.closed).into_iter().map(entry).collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Counts {
    /// Adds the bytes of open connections to the counts, and forgets those that have ended.
    fn collect(&mut self) {
        for (key, bytes) in std::mem::take(&mut self.open) {
            // Before the bytes are read: what an open connection adds later is counted later.
            let is_open = Arc::strong_count(&bytes) > 1;
            let sent = bytes.sent.swap(0, Ordering::Relaxed);
            let received = bytes.received.swap(0, Ordering::Relaxed);
            if sent + received > 0 {
                let count = self.count(key.clone());
                count.sent += sent;
                count.received += received;
            }
            if is_open {
                self.open.push((key, bytes));
            }
        }
    }

    /// The key under which a connection is counted.
    fn key(&self, key: Key) -> Key {
        let limit = match key.2 {
            NetworkVerdict::Allowed => MAX_ALLOWED,
            NetworkVerdict::Refused => MAX_REFUSED,
        };
        let known = self.closed.keys().filter(|known| known.2 == key.2).count();
        match known < limit || self.closed.contains_key(&key) {
            true => key,
            false => (OTHERS.to_owned(), 0, key.2),
        }
    }

    fn count(&mut self, key: Key) -> &mut Count {
        let key = self.key(key);
        let new = || Count { at: SystemTime::now().into(), connections: 0, sent: 0, received: 0 };
        self.closed.entry(key).or_insert_with(new)
    }
}

fn entry(((name, port, verdict), count): (Key, Count)) -> TrafficCount {
    let Count { at, connections, sent, received } = count;
    TrafficCount { name, port, verdict, at, connections, sent, received }
}

/// A stream inside the sandbox whose bytes are counted.
pub(crate) struct Counted<S> {
    pub(crate) stream: S,
    pub(crate) bytes: Arc<Bytes>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Counted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        self.bytes.count_sent(buffer.filled().len() - before);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncBufRead + Unpin> AsyncBufRead for Counted<S> {
    fn poll_fill_buf(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<&[u8]>> {
        Pin::new(&mut self.get_mut().stream).poll_fill_buf(context)
    }

    fn consume(mut self: Pin<&mut Self>, amount: usize) {
        self.bytes.count_sent(amount);
        Pin::new(&mut self.stream).consume(amount);
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counted<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(context, bytes))?;
        self.bytes.received.fetch_add(written as u64, Ordering::Relaxed);
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl Bytes {
    fn count_sent(&self, amount: usize) {
        self.sent.fetch_add(amount as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(counted: &[TrafficCount]) -> Vec<(&str, u64, u64, u64)> {
        let row = |one: &'_ TrafficCount| (one.connections, one.sent, one.received);
        counted.iter().map(|one| (one.name.as_str(), row(one).0, row(one).1, row(one).2)).collect()
    }

    #[tokio::test]
    async fn bytes_are_counted_while_a_connection_is_open() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let traffic = Traffic::default();
        let (mut peer, inside) = tokio::io::duplex(64);
        let bytes = traffic.connected("a.org", 443);
        let mut counted = Counted { stream: inside, bytes };
        peer.write_all(b"request").await.unwrap();
        counted.read_exact(&mut [0; 7]).await.unwrap();
        counted.write_all(b"answer!!").await.unwrap();
        assert_eq!(of(&traffic.take()), [("a.org", 1, 7, 8)]);
        assert_eq!(of(&traffic.take()), []);
        counted.write_all(b"more").await.unwrap();
        drop(counted);
        assert_eq!(of(&traffic.take()), [("a.org", 0, 0, 4)]);
        assert_eq!(of(&traffic.take()), []);
    }

    #[test]
    fn names_beyond_the_limit_are_counted_together() {
        let traffic = Traffic::default();
        for number in 0..MAX_REFUSED + 10 {
            traffic.refused(&format!("n{number}.org"), 443);
        }
        traffic.connected("visible.org", 443);
        let counted = traffic.take();
        assert_eq!(counted.len(), MAX_REFUSED + 2);
        assert_eq!(of(&counted)[0], (OTHERS, 10, 0, 0));
        assert!(counted.iter().any(|one| one.name == "visible.org"));
    }
}
