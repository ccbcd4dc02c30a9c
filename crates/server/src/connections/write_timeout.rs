//! Closes a connection whose client has stopped reading, so that the server keeps neither its
//! buffers nor its place. The client of an event stream resumes with its cursor.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep},
};

/// How long a write may make no progress.
#[derive(Debug, Clone, Copy)]
pub(super) struct WriteLimits {
    pub(super) event_stream: Duration,
    /// A terminal or a pager may wait for its user.
    pub(super) other: Duration,
}

/// A connection that fails when a write makes no progress for too long.
pub(super) struct WriteTimeout<T> {
    inner: T,
    /// The response is an event stream.
    following: Arc<AtomicBool>,
    limits: WriteLimits,
    /// Runs while a write waits for the client.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl<T> WriteTimeout<T> {
    pub(super) fn new(inner: T, limits: WriteLimits, following: Arc<AtomicBool>) -> Self {
        Self { inner, following, limits, deadline: None }
    }

    fn check<R>(
        &mut self,
        context: &mut Context<'_>,
        result: Poll<io::Result<R>>,
    ) -> Poll<io::Result<R>> {
        if result.is_ready() {
            self.deadline = None;
            return result;
        }
        let WriteLimits { event_stream, other } = self.limits;
        let limit = if self.following.load(Ordering::Relaxed) { event_stream } else { other };
        let deadline = self
            .deadline
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + limit)));
        ready!(deadline.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for WriteTimeout<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write(context, bytes);
        self.check(context, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write_vectored(context, slices);
        self.check(context, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;

    #[tokio::test]
    async fn each_unread_response_has_its_limit() {
        let (short, hour) = (Duration::from_millis(10), Duration::from_secs(3600));
        for (following, event_stream, other) in [(true, short, hour), (false, hour, short)] {
            let (ours, _theirs) = tokio::io::duplex(16);
            let flag = Arc::new(AtomicBool::new(following));
            let mut stream = WriteTimeout::new(ours, WriteLimits { event_stream, other }, flag);
            let error = stream.write_all(&[0; 64]).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        }
    }
}
