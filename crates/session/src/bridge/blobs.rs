//! Blobs fetched over the bridge.

use harvest_proto::{BlobId, bridge::ToSupervisor};
use tokio::sync::mpsc;

use super::{Bridge, BridgeError, Exec, ExecOutput, StreamKind};

impl Bridge {
    /// Reads a blob of at most `limit` bytes.
    ///
    /// # Errors
    /// When the supervisor refuses, the connection is lost, or the blob is longer.
    pub async fn blob_read(&self, blob: &BlobId, limit: usize) -> Result<Vec<u8>, BridgeError> {
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
            // No command to kill on drop.
            ended: true,
            detached: false,
        };
        let blob = blob.clone();
        self.request(|id| ToSupervisor::Blob { id, blob, stream }).await?;
        let mut bytes = Vec::new();
        reading.ended = false;
        let read = loop {
            match reading.next().await {
                Some(ExecOutput::Stdout { bytes: chunk, .. }) => bytes.extend_from_slice(&chunk),
                Some(_) => break Ok(bytes),
                None => break Err(BridgeError::Lost),
            }
            if bytes.len() > limit {
                break Err(BridgeError::TooLong { limit });
            }
        };
        reading.ended = true;
        read
    }
}
