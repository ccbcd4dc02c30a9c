//! Files moved over the bridge.

use harvest_proto::bridge::{FileRequest, FileStat, Reply, ToSupervisor};
use tokio::sync::mpsc;

use super::{Bridge, BridgeError, Exec, ExecOutput, StreamKind};

impl Bridge {
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
        let stream = self.new_stream();
        let credit = self.sending(stream);
        let request = FileRequest::Write { path: path.to_owned(), mode, user, stream };
        let posted = self.post(|id| ToSupervisor::File { id, request })?;
        let mut reply = Box::pin(posted.reply());
        // A refusal comes before the bytes are all sent; then nobody grants more.
        tokio::select! {
            early = &mut reply => return early.map(drop),
            _ = self.send_bytes(stream, &credit, bytes) => self.end_stream(stream),
        }
        reply.await.map(drop)
    }

    /// Reads a file of at most `limit` bytes.
    ///
    /// # Errors
    /// When the supervisor says no, the connection is lost, or it is longer.
    pub async fn file_read(&self, path: &str, limit: usize) -> Result<Vec<u8>, BridgeError> {
        let stream = self.new_stream();
        let (to, output) = mpsc::unbounded_channel();
        self.receive(stream, StreamKind::File, to);
        let mut reading = Exec {
            bridge: self.clone(),
            id: 0,
            streams: vec![stream],
            stdin: None,
            output,
            read: std::collections::HashMap::new(),
            ended: false,
        };
        let request = FileRequest::Read { path: path.to_owned(), stream };
        let mut reply = Box::pin(self.post(|id| ToSupervisor::File { id, request })?.reply());
        let (mut bytes, mut replied) = (Vec::new(), false);
        // The reply may come before the bytes or after them; a long file needs its grants meanwhile.
        loop {
            tokio::select! {
                answer = &mut reply, if !replied => match answer {
                    Ok(_) => replied = true,
                    Err(error) => {
                        reading.ended = true;
                        return Err(error);
                    }
                },
                output = reading.next() => match output {
                    Some(ExecOutput::Stdout { bytes: piece, .. }) => bytes.extend_from_slice(&piece),
                    Some(_) => return Ok(bytes),
                    None => return Err(BridgeError::Lost),
                },
            }
            if bytes.len() > limit {
                reading.ended = true;
                return Err(BridgeError::TooLong { limit });
            }
        }
    }

    /// What a path is.
    ///
    /// # Errors
    /// When it is not there, or the connection is lost.
    pub async fn file_stat(&self, path: &str) -> Result<FileStat, BridgeError> {
        let request = FileRequest::Stat { path: path.to_owned() };
        match self.request(|id| ToSupervisor::File { id, request }).await? {
            Reply::Stat(stat) => Ok(stat),
            _ => Err(BridgeError::Confused),
        }
    }

    /// What a folder holds.
    ///
    /// # Errors
    /// When it is not there, or the connection is lost.
    pub async fn file_list(&self, path: &str) -> Result<Vec<FileStat>, BridgeError> {
        let request = FileRequest::List { path: path.to_owned(), after: None };
        match self.request(|id| ToSupervisor::File { id, request }).await? {
            Reply::List { entries, .. } => Ok(entries),
            _ => Err(BridgeError::Confused),
        }
    }
}
