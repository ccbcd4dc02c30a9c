//! Sends a blob from the outbox to the owner, which stores it before it acknowledges the event.

use std::rc::Rc;

use harvest_proto::{
    BlobId,
    bridge::{Fault, MAX_DATA_BYTES, Reply, RequestId, StreamId},
};

use crate::{connection::Connection, outbox::Outbox};

/// Checks the request and runs it as a task of the connection.
pub(crate) fn start(
    connection: &Rc<Connection>,
    outbox: &Outbox,
    id: RequestId,
    blob: &BlobId,
    stream: StreamId,
) -> Result<(), Fault> {
    let full = outbox.blob(blob);
    let full = full.ok_or_else(|| Fault::not_found(format!("blob {blob} is not in the outbox")))?;
    let credit = connection.open_outgoing(stream)?;
    let shared = Rc::clone(connection);
    connection.spawn(async move {
        shared.reply(id, Ok(Reply::Done)).await;
        let mut rest = full.as_bytes();
        while !rest.is_empty() {
            let allowed = credit.available(rest.len().min(MAX_DATA_BYTES)).await;
            let (chunk, after) = rest.split_at(allowed);
            credit.spend(allowed);
            shared.data(stream, chunk).await;
            rest = after;
        }
        shared.end(stream).await;
    });
    Ok(())
}
