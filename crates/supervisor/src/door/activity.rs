//! Notes when the model service has last written something.

use std::{
    cell::Cell,
    io,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};

/// The time of the model's last byte.
#[derive(Debug, Default)]
pub(crate) struct ModelActivity(Cell<Option<Instant>>);

impl ModelActivity {
    pub(crate) fn last(&self) -> Option<Instant> {
        self.0.get()
    }
}

/// A connection whose incoming bytes are noted as activity.
pub(super) struct Watched<'a, Stream> {
    pub(super) stream: Stream,
    /// `None` for connections that are not to the model.
    pub(super) activity: Option<&'a ModelActivity>,
}

impl<Stream: AsyncRead + Unpin> AsyncRead for Watched<'_, Stream> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
        if let (Some(activity), true) = (self.activity, buffer.filled().len() > before) {
            activity.0.set(Some(Instant::now()));
        }
        polled
    }
}

impl<Stream: AsyncWrite + Unpin> AsyncWrite for Watched<'_, Stream> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[test]
    fn only_bytes_of_the_model_are_activity() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            for is_model in [true, false] {
                let activity = ModelActivity::default();
                let (mut far, stream) = tokio::net::UnixStream::pair().unwrap();
                let watched_activity = is_model.then_some(&activity);
                let mut watched = Watched { stream, activity: watched_activity };
                watched.write_all(b"request").await.unwrap();
                assert_eq!(activity.last(), None, "what the agent writes is not the model's");
                far.write_all(b"x").await.unwrap();
                watched.read_u8().await.unwrap();
                assert_eq!(activity.last().is_some(), is_model);
            }
        });
    }
}
