//! Git requests over the bridge. Dropping one of these futures cancels its request.

use harvest_proto::{
    CheckoutFolder,
    bridge::{DiffStat, GitQuery, GitRequest, Reply, ToSupervisor, Truncation},
};
use tokio::sync::mpsc;

use super::{Bridge, BridgeError, ExecOutput};

/// The output of a query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct QueryOutput {
    pub(crate) bytes: Vec<u8>,
    /// Why it is incomplete.
    pub(crate) truncated: Option<Truncation>,
}

impl Bridge {
    /// Saves the files of a checkout as a git tree; returns its id and its changes since `against`.
    pub(crate) async fn git_save_tree(
        &self,
        checkout: &CheckoutFolder,
        against: Option<&str>,
    ) -> Result<(String, DiffStat), BridgeError> {
        let (checkout, against) = (checkout.clone(), against.map(str::to_owned));
        let request = GitRequest::SaveTree { checkout, against };
        let posted = self.post(|id| ToSupervisor::Git { id, request })?;
        let (_, no_output) = mpsc::unbounded_channel();
        let mut cancel_on_drop = self.output_of(posted.id, Vec::new(), no_output);
        let reply = posted.reply().await;
        cancel_on_drop.ended = true;
        match reply? {
            Reply::SavedTree { tree, stat } => Ok((tree, stat)),
            _ => Err(BridgeError::UnexpectedReply),
        }
    }

    /// Runs a query; the output has at most `limit` bytes.
    pub(crate) async fn git_query(
        &self,
        checkout: &CheckoutFolder,
        query: GitQuery,
        limit: usize,
    ) -> Result<QueryOutput, BridgeError> {
        let (stream, output) = self.open_incoming();
        let checkout = checkout.clone();
        let request = GitRequest::Query { checkout, query, limit: limit as u64, stream };
        let posted = self.post(|id| ToSupervisor::Git { id, request })?;
        let mut chunks = self.output_of(posted.id, vec![stream], output);
        let mut reply = std::pin::pin!(posted.reply());
        let (mut bytes, mut early) = (Vec::new(), None);
        // The reply follows the end of the stream, except for a query that did not start; but it
        // may be seen before output that has already arrived.
        let reply = loop {
            tokio::select! {
                biased;
                chunk = chunks.next() => match chunk {
                    Some(ExecOutput::Stdout { bytes: chunk, .. }) => bytes.extend_from_slice(&chunk),
                    Some(_) => break match early {
                        Some(reply) => Ok(reply),
                        None => reply.await,
                    },
                    None => break Err(BridgeError::Lost),
                },
                reply = &mut reply, if early.is_none() => match reply {
                    Ok(reply) => early = Some(reply),
                    Err(error) => break Err(error),
                },
            }
            if bytes.len() > limit {
                break Err(BridgeError::TooLong { limit });
            }
        };
        chunks.ended = reply.is_ok();
        match reply? {
            Reply::Queried { truncated } => Ok(QueryOutput { bytes, truncated }),
            _ => Err(BridgeError::UnexpectedReply),
        }
    }

    /// Adds the objects of a pack to the saved trees of a checkout.
    pub(crate) async fn git_unpack_tree(
        &self,
        checkout: &CheckoutFolder,
        pack: &[u8],
    ) -> Result<(), BridgeError> {
        let checkout = checkout.clone();
        let mut writing = self.writer(|id, stream| {
            let request = GitRequest::UnpackTree { checkout, stream };
            ToSupervisor::Git { id, request }
        })?;
        writing.write(pack).await?;
        writing.finish().await
    }
}
