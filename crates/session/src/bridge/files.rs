//! Files moved over the bridge, in pieces: neither side ever holds one whole.

use std::{collections::HashMap, pin::Pin, sync::Arc};

use harvest_proto::bridge::{FileRequest, FileStat, Reply, RequestId, StreamId, ToSupervisor};
use tokio::sync::{Semaphore, mpsc};

use super::{Bridge, BridgeError, Exec, ExecOutput, StreamKind};

type Answer = Pin<Box<dyn Future<Output = Result<Reply, BridgeError>> + Send>>;

/// A file being read. Dropped before its end, it is given up.
pub struct FileReading {
    pieces: Exec,
    /// Until it has come.
    reply: Option<Answer>,
}

impl FileReading {
    /// The next piece; `None` at the end of the file. Cancel-safe.
    ///
    /// # Errors
    /// When the supervisor says no, or the connection is lost.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>, BridgeError> {
        self.started().await?;
        match self.pieces.next().await {
            Some(ExecOutput::Stdout { bytes, .. }) => Ok(Some(bytes)),
            Some(_) => Ok(None),
            None => Err(BridgeError::Lost),
        }
    }

    /// Waits until the file is open. The reply comes before the bytes.
    async fn started(&mut self) -> Result<(), BridgeError> {
        if let Some(reply) = &mut self.reply {
            let answer = reply.await;
            self.reply = None;
            if let Err(error) = answer {
                self.pieces.ended = true;
                return Err(error);
            }
        }
        Ok(())
    }
}

/// A file being written. Dropped before it is finished, it is given up and nothing of it stays.
pub struct FileWriting {
    bridge: Bridge,
    id: RequestId,
    stream: StreamId,
    credit: Arc<Semaphore>,
    reply: Option<Answer>,
}

impl FileWriting {
    /// Sends a piece, waiting while the disk is slow.
    ///
    /// # Errors
    /// When the supervisor says no, which may be before the end, or the connection is lost.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), BridgeError> {
        let Some(reply) = &mut self.reply else { return Err(BridgeError::Confused) };
        // A refusal comes before the bytes are all sent; then nobody grants more.
        tokio::select! {
            biased;
            early = reply => {
                self.reply = None;
                Err(early.err().unwrap_or(BridgeError::Confused))
            }
            sent = self.bridge.send_bytes(self.stream, &self.credit, bytes) => match sent {
                true => Ok(()),
                false => Err(BridgeError::Lost),
            },
        }
    }

    /// Says that this was all; the file is on disk under its name when this answers.
    ///
    /// # Errors
    /// When the supervisor says no, or the connection is lost.
    pub async fn finish(mut self) -> Result<(), BridgeError> {
        self.bridge.end_stream(self.stream);
        let Some(reply) = self.reply.take() else { return Err(BridgeError::Confused) };
        reply.await.map(drop)
    }
}

impl Drop for FileWriting {
    fn drop(&mut self) {
        self.bridge.close_stream(self.stream);
        if self.reply.is_some() {
            self.bridge.say(ToSupervisor::Kill { id: self.bridge.next_request(), exec: self.id });
        }
    }
}

impl Bridge {
    /// Begins to read a file, which is open when this answers.
    ///
    /// # Errors
    /// When the supervisor says no, or the connection is lost.
    pub async fn file_reading(&self, path: &str) -> Result<FileReading, BridgeError> {
        let stream = self.new_stream();
        let (to, output) = mpsc::unbounded_channel();
        self.receive(stream, StreamKind::File, to);
        let request = FileRequest::Read { path: path.to_owned(), stream };
        let posted = self.post(|id| ToSupervisor::File { id, request })?;
        let (bridge, id, streams, read) = (self.clone(), posted.id, vec![stream], HashMap::new());
        let pieces =
            Exec { bridge, id, streams, stdin: None, output, read, ended: false, detached: false };
        let mut reading = FileReading { pieces, reply: Some(Box::pin(posted.reply())) };
        reading.started().await?;
        Ok(reading)
    }

    /// Begins to write a file.
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn file_writing(
        &self,
        path: &str,
        mode: u32,
        user: Option<String>,
    ) -> Result<FileWriting, BridgeError> {
        let stream = self.new_stream();
        let credit = self.sending(stream);
        let request = FileRequest::Write { path: path.to_owned(), mode, user, stream };
        let posted = self.post(|id| ToSupervisor::File { id, request })?;
        let id = posted.id;
        Ok(FileWriting {
            bridge: self.clone(),
            id,
            stream,
            credit,
            reply: Some(Box::pin(posted.reply())),
        })
    }

    /// Writes a file; it is on disk under its name when this answers.
    ///
    /// # Errors
    /// When the supervisor says no, or the connection is lost.
    pub async fn file_write(
        &self,
        path: &str,
        mode: u32,
        user: Option<String>,
        bytes: &[u8],
    ) -> Result<(), BridgeError> {
        let mut writing = self.file_writing(path, mode, user)?;
        writing.write(bytes).await?;
        writing.finish().await
    }

    /// Reads a file of at most `limit` bytes.
    ///
    /// # Errors
    /// When the supervisor says no, the connection is lost, or it is longer.
    pub async fn file_read(&self, path: &str, limit: usize) -> Result<Vec<u8>, BridgeError> {
        let mut reading = self.file_reading(path).await?;
        let mut bytes = Vec::new();
        while let Some(piece) = reading.next().await? {
            bytes.extend_from_slice(&piece);
            if bytes.len() > limit {
                return Err(BridgeError::TooLong { limit });
            }
        }
        Ok(bytes)
    }

    /// What a path is; with `follow` what a link leads to.
    ///
    /// # Errors
    /// When it is not there, or the connection is lost.
    pub async fn file_stat(&self, path: &str, follow: bool) -> Result<FileStat, BridgeError> {
        match self.file(FileRequest::Stat { path: path.to_owned(), follow }).await? {
            Reply::Stat(stat) => Ok(stat),
            _ => Err(BridgeError::Confused),
        }
    }

    /// What a folder holds after a name, as much as fits a reply, and whether there is more.
    ///
    /// # Errors
    /// When it is not there, or the connection is lost.
    pub async fn file_list(
        &self,
        path: &str,
        after: &str,
    ) -> Result<(Vec<FileStat>, bool), BridgeError> {
        match self
            .file(FileRequest::List { path: path.to_owned(), after: Some(after.to_owned()) })
            .await?
        {
            Reply::List { entries, more } => Ok((entries, more)),
            _ => Err(BridgeError::Confused),
        }
    }

    /// Does something with a file that moves no bytes.
    ///
    /// # Errors
    /// When the supervisor says no, or the connection is lost.
    pub async fn file(&self, request: FileRequest) -> Result<Reply, BridgeError> {
        self.request(|id| ToSupervisor::File { id, request }).await
    }
}
