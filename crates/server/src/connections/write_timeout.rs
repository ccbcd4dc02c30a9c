//! Closes a connection whose client has stopped reading an event stream: the client resumes with
//! its cursor, and the server keeps neither its buffers nor its place.

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

/// A connection that fails when a write makes no progress for `limit`, once `enabled`.
pub(super) struct WriteTimeout<T> {
    inner: T,
    enabled: Arc<AtomicBool>,
    limit: Duration,
    /// Runs while a write waits for the client.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl<T> WriteTimeout<T> {
    /// The timeout applies only while `enabled` is set: other responses may wait for a pager.
    pub(super) fn new(inner: T, limit: Duration, enabled: Arc<AtomicBool>) -> Self {
        Self { inner, enabled, limit, deadline: None }
    }

    fn check<R>(
        &mut self,
        context: &mut Context<'_>,
        result: Poll<io::Result<R>>,
    ) -> Poll<io::Result<R>> {
        if result.is_ready() || !self.enabled.load(Ordering::Relaxed) {
            self.deadline = None;
            return result;
        }
        let limit = self.limit;
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
    async fn only_unread_event_streams_time_out() {
        for enabled in [true, false] {
            let (ours, _theirs) = tokio::io::duplex(16);
            let flag = Arc::new(AtomicBool::new(enabled));
            let mut stream = WriteTimeout::new(ours, Duration::from_millis(10), flag);
            let write = stream.write_all(&[0; 64]);
            let written = tokio::time::timeout(Duration::from_millis(200), write).await;
            let timed_out =
                matches!(written, Ok(Err(error)) if error.kind() == io::ErrorKind::TimedOut);
            assert_eq!(timed_out, enabled);
        }
    }
}
