//! Files and blobs transferred over the bridge in chunks: neither side holds a whole file in
//! memory.

use std::{pin::Pin, sync::Arc};

use harvest_proto::{
    BlobId,
    bridge::{FileRequest, FileStat, Reply, RequestId, StreamId, ToSupervisor},
};
use tokio::sync::Semaphore;

use super::{Bridge, BridgeError, Exec, ExecOutput};

type PendingResult = Pin<Box<dyn Future<Output = Result<Reply, BridgeError>> + Send>>;

/// A file or a blob being read. Dropping this cancels the transfer.
pub struct FileReader {
    chunks: Exec,
    /// `None` once it has arrived.
    reply: Option<PendingResult>,
}

impl FileReader {
    /// The next chunk; `None` at the end of the file. Cancel-safe.
    ///
    /// # Errors
    /// When the supervisor refuses, or the connection is lost.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>, BridgeError> {
        self.started().await?;
        match self.chunks.next().await {
            Some(ExecOutput::Stdout { bytes, .. }) => Ok(Some(bytes)),
            Some(_) => Ok(None),
            None => Err(BridgeError::Lost),
        }
    }

    async fn read_all(mut self, limit: usize) -> Result<Vec<u8>, BridgeError> {
        let mut bytes = Vec::new();
        while let Some(chunk) = self.next().await? {
            bytes.extend_from_slice(&chunk);
            if bytes.len() > limit {
                return Err(BridgeError::TooLong { limit });
            }
        }
        Ok(bytes)
    }

    /// Waits until the file is open. The reply comes before the bytes.
    async fn started(&mut self) -> Result<(), BridgeError> {
        if let Some(reply) = &mut self.reply {
            let answer = reply.await;
            self.reply = None;
            if let Err(error) = answer {
                self.chunks.ended = true;
                return Err(error);
            }
        }
        Ok(())
    }
}

/// A file or a pack being written. Dropping this before `finish` cancels the transfer and leaves
/// nothing.
pub struct FileWriter {
    bridge: Bridge,
    id: RequestId,
    stream: StreamId,
    credit: Arc<Semaphore>,
    reply: Option<PendingResult>,
}

impl FileWriter {
    /// Sends a chunk; waits for credit while the disk is slow.
    ///
    /// # Errors
    /// When the supervisor refuses, which may be before the end, or the connection is lost.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), BridgeError> {
        let Some(reply) = &mut self.reply else { return Err(BridgeError::UnexpectedReply) };
        // A refusal arrives before all bytes are sent; no more credit follows it.
        tokio::select! {
            biased;
            early = reply => {
                self.reply = None;
                Err(early.err().unwrap_or(BridgeError::UnexpectedReply))
            }
            sent = self.bridge.send_bytes(self.stream, &self.credit, bytes) => match sent {
                true => Ok(()),
                false => Err(BridgeError::Lost),
            },
        }
    }

    /// Ends the file; it is on disk under its name when this returns.
    ///
    /// # Errors
    /// When the supervisor refuses, or the connection is lost.
    pub async fn finish(mut self) -> Result<(), BridgeError> {
        self.bridge.end_stream(self.stream);
        let Some(reply) = self.reply.take() else { return Err(BridgeError::UnexpectedReply) };
        reply.await.map(drop)
    }
}

impl Drop for FileWriter {
    fn drop(&mut self) {
        self.bridge.close_stream(self.stream);
        if self.reply.is_some() {
            self.bridge.send(ToSupervisor::Kill { id: self.bridge.next_request(), exec: self.id });
        }
    }
}

impl Bridge {
    /// Opens a file for reading.
    ///
    /// # Errors
    /// When the supervisor refuses, or the connection is lost.
    pub async fn file_reader(
        &self,
        path: &str,
        user: Option<String>,
    ) -> Result<FileReader, BridgeError> {
        self.reader(|id, stream| {
            let request = FileRequest::Read { path: path.to_owned(), stream };
            ToSupervisor::File { id, user, request }
        })
        .await
    }

    /// Reads a blob of at most `limit` bytes.
    ///
    /// # Errors
    /// When the supervisor refuses, the connection is lost, or the blob is longer.
    pub async fn blob_read(&self, blob: &BlobId, limit: usize) -> Result<Vec<u8>, BridgeError> {
        let blob = blob.clone();
        let reading = self.reader(|id, stream| ToSupervisor::Blob { id, blob, stream });
        reading.await?.read_all(limit).await
    }

    /// Posts a request that is answered and then writes bytes to a stream.
    async fn reader(
        &self,
        make: impl FnOnce(RequestId, StreamId) -> ToSupervisor,
    ) -> Result<FileReader, BridgeError> {
        let (stream, output) = self.open_incoming();
        let posted = self.post(|id| make(id, stream))?;
        let chunks = self.output_of(posted.id, vec![stream], output);
        let mut reading = FileReader { chunks, reply: Some(Box::pin(posted.reply())) };
        reading.started().await?;
        Ok(reading)
    }

    /// Starts to write a file.
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn file_writer(
        &self,
        path: &str,
        mode: u32,
        user: Option<String>,
    ) -> Result<FileWriter, BridgeError> {
        self.writer(|id, stream| {
            let request = FileRequest::Write { path: path.to_owned(), mode, stream };
            ToSupervisor::File { id, user, request }
        })
    }

    /// Posts a request that reads bytes from a stream.
    pub(super) fn writer(
        &self,
        make: impl FnOnce(RequestId, StreamId) -> ToSupervisor,
    ) -> Result<FileWriter, BridgeError> {
        let stream = self.new_stream();
        let credit = self.open_outgoing(stream);
        let posted = self.post(|id| make(id, stream))?;
        let (bridge, id) = (self.clone(), posted.id);
        Ok(FileWriter { bridge, id, stream, credit, reply: Some(Box::pin(posted.reply())) })
    }

    /// Writes a file; it is on disk under its name when this returns.
    ///
    /// # Errors
    /// When the supervisor refuses, or the connection is lost.
    pub async fn file_write(
        &self,
        path: &str,
        mode: u32,
        user: Option<String>,
        bytes: &[u8],
    ) -> Result<(), BridgeError> {
        let mut writing = self.file_writer(path, mode, user)?;
        writing.write(bytes).await?;
        writing.finish().await
    }

    /// Reads a file of at most `limit` bytes.
    ///
    /// # Errors
    /// When the supervisor refuses, the connection is lost, or the file is longer.
    pub async fn file_read(
        &self,
        path: &str,
        user: Option<String>,
        limit: usize,
    ) -> Result<Vec<u8>, BridgeError> {
        self.file_reader(path, user).await?.read_all(limit).await
    }

    /// With `follow`, describes what a link leads to.
    ///
    /// # Errors
    /// When the path does not exist, or the connection is lost.
    pub async fn file_stat(
        &self,
        path: &str,
        user: Option<String>,
        follow: bool,
    ) -> Result<FileStat, BridgeError> {
        match self.file(user, FileRequest::Stat { path: path.to_owned(), follow }).await? {
            Reply::Stat(stat) => Ok(stat),
            _ => Err(BridgeError::UnexpectedReply),
        }
    }

    /// The entries of a folder after a name, as many as fit a reply, and whether there are more.
    ///
    /// # Errors
    /// When the path does not exist, or the connection is lost.
    pub async fn file_list(
        &self,
        path: &str,
        user: Option<String>,
        after: &str,
    ) -> Result<(Vec<FileStat>, bool), BridgeError> {
        let (path, after) = (path.to_owned(), Some(after.to_owned()));
        match self.file(user, FileRequest::List { path, after }).await? {
            Reply::List { entries, more } => Ok((entries, more)),
            _ => Err(BridgeError::UnexpectedReply),
        }
    }

    /// Runs a file operation that transfers no bytes.
    ///
    /// # Errors
    /// When the supervisor refuses, or the connection is lost.
    pub async fn file(
        &self,
        user: Option<String>,
        request: FileRequest,
    ) -> Result<Reply, BridgeError> {
        self.request(|id| ToSupervisor::File { id, user, request }).await
    }
}
