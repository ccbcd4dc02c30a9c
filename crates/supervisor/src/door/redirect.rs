//! Relays connections: the kernel redirects connections to synthetic addresses to this listener,
//! which asks the gateway to connect to the address's name. The content is not inspected; only the
//! time of the model's last byte is noted.

use std::{io, rc::Rc};

use harvest_proto::door::{DoorReply, DoorRequest, MODEL_NAME};
use tokio::{io::copy_bidirectional_with_sizes, net::TcpStream};

use super::{Gateway, activity::Watched};

pub(super) const MAX_CONNECTIONS: usize = 1024;

// Per direction and connection: 32 MiB in total at the limit.
const BUFFER_BYTES: usize = 16 * 1024;

/// Relays a connection if the gateway opens it.
pub(super) async fn relay(mut inside: TcpStream, gateway: Rc<Gateway>) -> io::Result<()> {
    let destination = rustix::net::sockopt::ip_original_dst(&inside)?;
    let Some(name) = gateway.names.name(*destination.ip()) else { return refuse(&inside) };
    let is_model = name == MODEL_NAME;
    let reply =
        gateway.ask_with_retry(&DoorRequest::Connect { name, port: destination.port() }).await;
    let Ok((DoorReply::Open, outside)) = reply else { return refuse(&inside) };
    let mut outside =
        Watched { stream: outside, activity: is_model.then_some(&gateway.model_activity) };
    let _latency_only = inside.set_nodelay(true);
    // Not logged: either end may break the connection.
    let _broken =
        copy_bidirectional_with_sizes(&mut inside, &mut outside, BUFFER_BYTES, BUFFER_BYTES).await;
    Ok(())
}

// With a reset, so that the client fails at once.
fn refuse(inside: &TcpStream) -> io::Result<()> {
    inside.set_zero_linger()
}
