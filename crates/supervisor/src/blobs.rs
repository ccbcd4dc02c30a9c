//! Sends a blob that waits in the outbox to the owner, before its event counts as stored.

use std::rc::Rc;

use harvest_proto::{
    BlobId,
    bridge::{Fault, FaultCode, MAX_DATA_BYTES, Reply, RequestId, StreamId},
};

use crate::connection::Connection;

/// Checks the request and carries it out beside everything else.
pub(crate) fn start(
    connection: &Rc<Connection>,
    id: RequestId,
    blob: &BlobId,
    stream: StreamId,
) -> Result<(), Fault> {
    let whole = connection.supervisor.outbox.blob(blob);
    let whole =
        whole.ok_or_else(|| Fault::new(FaultCode::NotFound, format!("{blob} is not here")))?;
    let credit = connection.sends(stream)?;
    let here = Rc::clone(connection);
    connection.spawn(async move {
        here.reply(id, Ok(Reply::Done)).await;
        let mut rest = whole.as_bytes();
        while !rest.is_empty() {
            let may = credit.available(rest.len().min(MAX_DATA_BYTES)).await;
            let (piece, after) = rest.split_at(may);
            credit.spend(may);
            here.data(stream, piece).await;
            rest = after;
        }
        here.end(stream).await;
    });
    Ok(())
}
