//! Relays connections: the kernel redirects connections to synthetic addresses to this listener,
//! which asks the gateway to connect to the address's name. The content is not inspected.

use std::{io, rc::Rc, sync::Arc, time::Duration};

use harvest_proto::door::{DoorReply, DoorRequest};
use tokio::{
    io::copy_bidirectional_with_sizes,
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};

use super::{Gateway, names::Names};

const MAX_CONNECTIONS: usize = 1024;

// Per direction and connection: 32 MiB in total at the limit.
const BUFFER_BYTES: usize = 16 * 1024;

const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Accepts connections. Beyond the limit they wait in the kernel's queue.
pub(super) async fn serve(listener: TcpListener, gateway: Rc<Gateway>, names: Rc<Names>) {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    while let Ok(permit) = Arc::clone(&permits).acquire_owned().await {
        match listener.accept().await {
            Ok((stream, _)) => {
                let (gateway, names) = (Rc::clone(&gateway), Rc::clone(&names));
                tokio::task::spawn_local(async move {
                    let _permit = permit;
                    // Not logged: processes inside can cause failures at will.
                    let _refused = relay(stream, &gateway, &names).await;
                });
            }
            Err(_too_many_files) => tokio::time::sleep(ACCEPT_RETRY_DELAY).await,
        }
    }
}

async fn relay(mut inside: TcpStream, gateway: &Gateway, names: &Names) -> io::Result<()> {
    let destination = rustix::net::sockopt::ip_original_dst(&inside)?;
    let Some(name) = names.name(*destination.ip()) else { return refuse(&inside) };
    let reply =
        gateway.ask_with_retry(&DoorRequest::Connect { name, port: destination.port() }).await;
    let Ok((DoorReply::Open, mut outside)) = reply else { return refuse(&inside) };
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
