//! What is asked for in the API's words, as a spec of the engine; and an engine's sandbox in the API's
//! words. Pure.

use harvest_engine::{
    EngineError, Image, Inspected, Limits, Network, Origin, Owner, SandboxState, Spec, VolumeMount,
};
use harvest_proto::api::machines::{
    Sandbox, SandboxLimits, SandboxNetwork, SandboxStatus, VolumeMount as Mount,
};
use harvest_session::machines::{MachineError, NewSandbox};

/// What a sandbox of one's own starts from when nobody says.
const IMAGE: &str = "base";

/// The spec of a sandbox that is asked for.
pub(super) fn spec(new: NewSandbox, owner: Owner) -> Result<Spec, MachineError> {
    let NewSandbox { id, made_by, order } = new;
    let from = match (order.image, order.from) {
        (Some(_), Some(_)) => {
            let what = "a sandbox starts from an `image` or `from` a snapshot, not both";
            return Err(MachineError::invalid("invalid_sandbox", what));
        }
        (image, None) => Origin::Image(image.unwrap_or_else(|| IMAGE.to_owned())),
        (None, Some(snapshot)) => Origin::Snapshot(snapshot),
    };
    let network = match order.network {
        SandboxNetwork::None => Network::Nothing,
        SandboxNetwork::Host => Network::Host,
        SandboxNetwork::Gateway => {
            let what = "only a session's sandbox has the gateway";
            return Err(MachineError::invalid("invalid_sandbox", what));
        }
    };
    Ok(Spec {
        id,
        from,
        limits: limits(order.limits),
        network,
        owner,
        binds: Vec::new(),
        volumes: order.volumes.into_iter().map(mount).collect::<Result<_, _>>()?,
        env: order.env,
        made_by,
    })
}

fn limits(given: SandboxLimits) -> Limits {
    let default = Limits::default();
    Limits {
        memory_bytes: given.memory_bytes.unwrap_or(default.memory_bytes),
        cpu_millis_per_second: given.cpu_millis_per_second.unwrap_or(default.cpu_millis_per_second),
        pids: given.pids.unwrap_or(default.pids),
        writable_bytes: given.writable_bytes.or(default.writable_bytes),
        lifetime_secs: given.lifetime_secs.or(default.lifetime_secs),
    }
}

fn mount(given: Mount) -> Result<VolumeMount, MachineError> {
    let invalid = |what: String| MachineError::invalid("invalid_volume", what);
    if !given.inside.starts_with('/') {
        return Err(invalid(format!("`{}` is not an absolute path inside", given.inside)));
    }
    let name = given.name.parse().map_err(|error: EngineError| invalid(error.to_string()))?;
    Ok(VolumeMount { name, inside: given.inside.into(), read_only: given.read_only })
}

/// A sandbox as the API shows it.
pub(super) fn shown(sandbox: Inspected, images: &[Image]) -> Sandbox {
    let image = image(&sandbox, images).map(str::to_owned);
    let Inspected { spec, created_at, state } = sandbox;
    let (state, reason, pid) = match state {
        SandboxState::Running(running) => (SandboxStatus::Running, None, Some(running.pid)),
        SandboxState::Dead { reason } => (SandboxStatus::Dead, Some(reason), None),
        SandboxState::Gone => (SandboxStatus::Dead, Some("gone".to_owned()), None),
    };
    let (layers, config) = match spec.from {
        Origin::Layers { layers, config } => (layers, config),
        // What is inspected has its origin looked up.
        Origin::Image(_) | Origin::Snapshot(_) => Default::default(),
    };
    Sandbox {
        id: spec.id,
        state,
        reason,
        pid,
        image,
        owner: owner(spec.owner),
        made_by: spec.made_by,
        network: match spec.network {
            Network::Nothing => SandboxNetwork::None,
            Network::Door => SandboxNetwork::Gateway,
            Network::Host => SandboxNetwork::Host,
        },
        limits: SandboxLimits {
            memory_bytes: Some(spec.limits.memory_bytes),
            cpu_millis_per_second: Some(spec.limits.cpu_millis_per_second),
            pids: Some(spec.limits.pids),
            writable_bytes: spec.limits.writable_bytes,
            lifetime_secs: spec.limits.lifetime_secs,
        },
        volumes: spec.volumes.into_iter().map(shown_mount).collect(),
        env: spec.env,
        user: config.user,
        workdir: config.workdir,
        layers: layers.into_iter().map(String::from).collect(),
        created_at,
    }
}

fn shown_mount(mount: VolumeMount) -> Mount {
    let inside = mount.inside.to_string_lossy().into_owned();
    Mount { name: mount.name.to_string(), inside, read_only: mount.read_only }
}

/// The image it grew from: the one that makes up most of it.
fn image<'a>(sandbox: &Inspected, images: &'a [Image]) -> Option<&'a str> {
    let Origin::Layers { layers, .. } = &sandbox.spec.from else { return None };
    let grown = images.iter().filter(|image| layers.starts_with(&image.layers));
    grown.max_by_key(|image| image.layers.len()).map(|image| image.name.as_str())
}

fn owner(owner: Owner) -> String {
    match owner {
        Owner::Kept => "you".to_owned(),
        Owner::Sessions => "session".to_owned(),
        Owner::Process(pid) => format!("process {pid}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harvest_proto::{SandboxId, SnapshotId, api::machines::CreateSandbox};

    fn new(order: CreateSandbox) -> NewSandbox {
        NewSandbox { id: SandboxId::random(), made_by: None, order }
    }

    #[test]
    fn what_is_not_said_is_as_safe_as_can_be() {
        let spec = spec(new(CreateSandbox::default()), Owner::Kept).unwrap();
        assert_eq!((spec.from, spec.network), (Origin::Image("base".into()), Network::Nothing));
        assert_eq!((spec.limits, spec.owner), (Limits::default(), Owner::Kept));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let volume = |name: &str, inside: &str| CreateSandbox {
            volumes: vec![Mount { name: name.into(), inside: inside.into(), read_only: false }],
            ..CreateSandbox::default()
        };
        let both = CreateSandbox {
            image: Some("base".into()),
            from: Some(SnapshotId::random()),
            ..CreateSandbox::default()
        };
        let gateway =
            CreateSandbox { network: SandboxNetwork::Gateway, ..CreateSandbox::default() };
        for order in [both, gateway, volume("../x", "/a"), volume("data", "relative")] {
            assert!(spec(new(order.clone()), Owner::Process(1)).is_err(), "{order:?}");
        }
    }
}
