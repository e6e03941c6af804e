{{/* Refuses an update that can neither add nor remove a pod: (spec, for). */}}
{{- define "diptych.checkStrategy" -}}
{{- if and (has (toString .spec.strategy.maxSurge) (list "0" "0%")) (has (toString .spec.strategy.maxUnavailable) (list "0" "0%")) }}
{{- fail (printf "%s: strategy.maxSurge and strategy.maxUnavailable are both 0, so no update could start: set one of them to 1" .for) }}
{{- end }}
{{- end }}

{{/* Refuses more devices than a worker can use, and devices that it would not use: (pool, for). */}}
{{- define "diptych.checkDevices" -}}
{{- $wanted := .pool.accelerator }}
{{- if gt (int $wanted.count) 1 }}
{{- fail (printf "%s: accelerator.count is %d, but each rank of a worker uses one device, so the others would be idle: set count 1, and replicas %d or tensorParallelSize %d" .for (int $wanted.count) (mul (int $wanted.count) (int .pool.replicas)) (int $wanted.count)) }}
{{- end }}
{{- range $name, $amount := .pool.resources.limits }}
{{- if and (eq $wanted.vendor "none") (not $wanted.device) (regexMatch "^(nvidia\\.com/(gpu|mig)|amd\\.com/gpu|gpu\\.intel\\.com/)" $name) }}
{{- fail (printf "%s: resources.limits has %s, but accelerator.vendor none runs the CPU image on CPUs: set accelerator.vendor to nvidia, amd or intel, which also requests the device" $.for $name) }}
{{- end }}
{{- if and (ne $wanted.vendor "none") (gt (int $wanted.count) 0) (eq $name (include "diptych.acceleratorResource" $wanted)) (ne (int $amount) (int (include "diptych.devices" $))) }}
{{- fail (printf "%s: resources.limits has %s %v, but its pods use %s, one for each rank in them: omit it" $.for $name $amount (include "diptych.devices" $)) }}
{{- end }}
{{- end }}
{{- end }}

{{/* A Kubernetes quantity as a number: bytes, CPUs or devices. */}}
{{- define "diptych.quantity" -}}
{{- if kindIs "string" . }}
{{- $number := regexFind "^[0-9.]+([eE][0-9]+)?" . }}
{{- $units := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 }}
{{- mulf (float64 $number) (get $units (trimPrefix $number .)) | printf "%f" }}
{{- else }}
{{- float64 . | printf "%f" }}
{{- end }}
{{- end }}

{{/* Refuses resources that the API server rejects or that kill a pod which uses what its settings allow: (spec, for). */}}
{{- define "diptych.checkResources" -}}
{{- $limits := .spec.resources.limits | default dict }}
{{- range $name, $amount := .spec.resources.requests }}
{{- if hasKey $limits $name }}
{{- if gt (include "diptych.quantity" $amount | float64) (include "diptych.quantity" (get $limits $name) | float64) }}
{{- fail (printf "%s: resources.requests.%s %v is above resources.limits.%s %v, which Kubernetes rejects" $.for $name $amount $name (get $limits $name)) }}
{{- end }}
{{- end }}
{{- end }}
{{- $disk := (.spec.kvDisk | default dict) }}
{{- if and $disk.enabled (hasKey $limits "ephemeral-storage") }}
{{- if gt (mulf $disk.gib 1073741824.0) (include "diptych.quantity" (get $limits "ephemeral-storage") | float64) }}
{{- fail (printf "%s: kvDisk.gib %d is above resources.limits.ephemeral-storage %v, so its pods would be evicted" .for (int $disk.gib) (get $limits "ephemeral-storage")) }}
{{- end }}
{{- end }}
{{- $cache := .spec.settings.kv_memory_gib | default 0 }}
{{- if and .spec.accelerator $cache (hasKey $limits "memory") }}
{{- if and (eq (include "diptych.device" .spec.accelerator) "cpu") (ge (mulf $cache (div (int .spec.tensorParallelSize) (int .spec.rankHosts)) 1073741824.0) (include "diptych.quantity" $limits.memory | float64)) }}
{{- fail (printf "%s: settings.kv_memory_gib %v for each rank leaves nothing of resources.limits.memory %v for the model" .for $cache $limits.memory) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Security context of a container, in which its own fields override those of its pod, as YAML: (spec). */}}
{{- define "diptych.security" -}}
{{- toYaml (mustMergeOverwrite (dict) (mustDeepCopy (.spec.podSecurityContext | default dict)) (mustDeepCopy (.spec.securityContext | default dict))) }}
{{- end }}

{{/* Refuses pods that the kubelet or the API server rejects for their user, or for names that the chart uses: (spec, for). */}}
{{- define "diptych.checkPod" -}}
{{- $security := include "diptych.security" . | fromYaml }}
{{- if and $security.runAsNonRoot (hasKey $security "runAsUser") (eq (toString $security.runAsUser) "0") }}
{{- fail (printf "%s: runAsUser 0 with runAsNonRoot true never starts: set runAsNonRoot false in podSecurityContext and securityContext, or another user" .for) }}
{{- end }}
{{- $volumes := list "config" "tmp" "cache" "model" "trusted-ca" "curve" "api-keys" "tls" "kv-disk" "responses" }}
{{- if (.spec.shm | default dict).enabled }}{{ $volumes = append $volumes "shm" }}{{ end }}
{{- range .spec.extraVolumes }}
{{- if has .name $volumes }}{{ fail (printf "%s: extraVolumes has %s, a volume of the chart: use another name than %s" $.for .name (join ", " $volumes)) }}{{ end }}
{{- end }}
{{- $containers := list "router" "worker" "rank-host" "fetch-model" "fetch-draft-model" }}
{{- range concat .spec.sidecars .spec.initContainers }}
{{- if has .name $containers }}{{ fail (printf "%s: %s is a container of the chart: use another name in sidecars and initContainers than %s" $.for .name (join ", " $containers)) }}{{ end }}
{{- end }}
{{- end }}

{{/* Refuses variables that the chart sets, and settings as variables, because they override its file: (root, spec, for). */}}
{{- define "diptych.checkEnvironment" -}}
{{- $names := list "DIPTYCH_WORKER_ID" "DIPTYCH_ADVERTISE_HOST" }}
{{- range include "diptych.environment" . | fromYamlArray }}{{ $names = append $names .name }}{{ end }}
{{- range .spec.env }}
{{- if has .name $names }}{{ fail (printf "%s: env has %s, which the chart sets: remove it" $.for .name) }}{{ end }}
{{- if and (hasPrefix "DIPTYCH_" .name) (not (has .name (list "DIPTYCH_API_KEY" "DIPTYCH_MARCH"))) }}
{{- fail (printf "%s: env has %s, which would override settings of the chart: use `settings`" $.for .name) }}
{{- end }}
{{- end }}
{{- end }}

{{/*
Settings that determine the layout of a pool's KV blocks, as YAML. Workers pair only with equal layouts. Defaults are resolved
as a worker does; `auto` counts as what it is for an unquantized checkpoint, and on a CPU `dtype: auto` depends on the CPU: (pool).
*/}}
{{- define "diptych.layout" -}}
{{- $gpu := hasPrefix "cuda" (include "diptych.device" .pool.accelerator) }}
{{- $given := .pool.settings }}
{{- $layout := dict "block_size" ($given.block_size | default (ternary 64 16 $gpu) | int) }}
{{- $dtype := $given.dtype | default "auto" }}
{{- $_ := set $layout "dtype" (ternary "bfloat16" $dtype (and $gpu (eq $dtype "auto"))) }}
{{- range $name, $default := dict "quantization" "none" "kv_cache_dtype" "native" }}
{{- $value := get $given $name | default "auto" }}
{{- $_ := set $layout $name (ternary $default $value (eq $value "auto")) }}
{{- end }}
{{- $_ := set $layout "engine" .pool.engine }}
{{- $_ := set $layout "batch_invariant" (default false $given.batch_invariant) }}
{{- /* Heads in different folders may be copies of one. */}}
{{- $_ := set $layout "draft_head" (ternary $given.draft_head (ternary "a folder" "none" (ne ($given.draft_head | default "") "")) (eq ($given.draft_head | default "") "mtp")) }}
{{- toYaml $layout }}
{{- end }}

{{/* Value of a setting for a message, with its default: (pool, layout, setting). */}}
{{- define "diptych.layoutValue" -}}
{{- $device := include "diptych.device" .pool.accelerator }}
{{- $given := ternary .pool.engine (get .pool.settings .setting) (eq .setting "engine") }}
{{- printf "%v%s" (ternary (get .layout .setting) $given (empty $given)) (ternary (printf " (the default on %s)" $device) "" (empty $given)) }}
{{- end }}

{{/* Refuses pools of a model that no pool of the other role can exchange KV with: (root, model). */}}
{{- define "diptych.checkPairs" -}}
{{- $running := dict }}
{{- range $role := list "prefill" "decode" }}
{{- $pools := list }}
{{- range (include "diptych.pools" (dict "root" $.root "role" $role "model" $.model) | fromYaml).pools }}
{{- /* A model without generation has a decode pool of 0 replicas. */}}
{{- if or (ne .autoscaling.type "none") (gt (int .replicas) 0) }}
{{- $pools = append $pools (dict "pool" . "layout" (include "diptych.layout" (dict "pool" .) | fromYaml)) }}
{{- end }}
{{- end }}
{{- $_ := set $running $role $pools }}
{{- end }}
{{- range $role, $other := dict "prefill" "decode" "decode" "prefill" }}
{{- range $one := get $running $role }}
{{- $pairs := not (get $running $other) }}
{{- range get $running $other }}{{ if eq (toJson .layout) (toJson $one.layout) }}{{ $pairs = true }}{{ end }}{{ end }}
{{- if not $pairs }}
{{- $second := first (get $running $other) }}
{{- $differences := list }}
{{- $names := list }}
{{- range $setting, $value := $one.layout }}
{{- if ne (toJson $value) (toJson (get $second.layout $setting)) }}
{{- $names = append $names (ternary $setting (printf "settings.%s" $setting) (eq $setting "engine")) }}
{{- $differences = append $differences (printf "%s %s and %s" $setting (include "diptych.layoutValue" (dict "pool" $one.pool "layout" $one.layout "setting" $setting)) (include "diptych.layoutValue" (dict "pool" $second.pool "layout" $second.layout "setting" $setting))) }}
{{- end }}
{{- end }}
{{- fail (printf "model %s: %s pool %s and %s pool %s cannot exchange KV, because they have %s: set the same %s in both, for example in workers.settings" $.model $role $one.pool.name $other $second.pool.name (join ", " $differences) (join " and " $names)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuses transports that the pods of a pool cannot use, and adapters that it cannot load: (root, pool, for). */}}
{{- define "diptych.checkSettings" -}}
{{- include "diptych.checkEngine" . }}
{{- $transport := .pool.settings.kv_transport | default "auto" }}
{{- if and (eq $transport "nixl") .root.Values.curve.existingSecret }}
{{- fail (printf "%s: settings.kv_transport is nixl, which curve.existingSecret does not encrypt, so its workers would not start: use auto or tcp, or no key pair" .for) }}
{{- end }}
{{- if and (eq $transport "shm") (not .pool.hostPID) }}
{{- fail (printf "%s: settings.kv_transport is shm, but pods do not share a process namespace, so no KV would arrive: use auto or tcp, or hostPID" .for) }}
{{- end }}
{{- $model := include "diptych.model" (dict "root" .root "name" .pool.model "for" .for) | fromYaml }}
{{- $adapters := 0 }}
{{- range $model.adapters }}{{ if . }}{{ $adapters = add1 $adapters }}{{ end }}{{ end }}
{{- $places := int (.pool.settings.max_loras | default (len (.pool.settings.lora | default list))) }}
{{- if gt (int $adapters) $places }}
{{- fail (printf "%s: settings.max_loras is %d, but models.%s.adapters has %d: set workers.settings.max_loras to %d or more" .for $places .pool.model $adapters $adapters) }}
{{- end }}
{{- end }}

{{/* Refuses values that the engine of a pool does not have: (pool, for). */}}
{{- define "diptych.checkEngine" -}}
{{- $pool := .pool }}
{{- if eq $pool.engine "vllm" }}
{{- if $pool.kvDisk.enabled }}
{{- fail (printf "%s: kvDisk.enabled needs engine diptych: vLLM does not cache blocks on disk" .for) }}
{{- end }}
{{- if and $pool.hostNetwork (include "diptych.hasRankPorts" (dict "pool" $pool)) }}
{{- fail (printf "%s: hostNetwork with engine vllm and tensorParallelSize %d would need a port of the node for each rank: use the pod network" .for (int $pool.tensorParallelSize)) }}
{{- end }}
{{- /* As in common/config/vllm.py. */}}
{{- range $name := list "quantization" "draft_head" "draft_model" "draft_quantization" "max_draft_tokens" "batch_invariant" "kernel_check" "kv_cache_dtype" "kv_host_gib" "kv_disk_path" "kv_disk_gib" "kv_wire_dtype" "role_change" "cuda_graphs" "local_prefill_chunk" "watermark" }}
{{- if hasKey $pool.settings $name }}
{{- fail (printf "%s: settings.%s has no meaning with engine vllm: omit it, or use an argument of vLLM in engineArgs (docs/guides/engines.md)" $.for $name) }}
{{- end }}
{{- end }}
{{- if eq ($pool.settings.kv_transport | default "auto") "cuda-ipc" }}
{{- fail (printf "%s: settings.kv_transport is cuda-ipc, which workers with engine vllm do not have: use auto, tcp, shm or nixl" .for) }}
{{- end }}
{{- range $argument := $pool.engineArgs }}
{{- if regexMatch "^(--tensor[-_]parallel[-_]size|-tp)(=|$)" $argument }}
{{- fail (printf "%s: engineArgs has %s: use tensorParallelSize, which also requests the devices" $.for $argument) }}
{{- else if regexMatch "^(--pipeline[-_]parallel[-_]size|-pp|--prefill[-_]context[-_]parallel[-_]size|-pcp)(=|$)" $argument }}
{{- fail (printf "%s: engineArgs has %s, but a pod has one device for each of its tensorParallelSize ranks: omit it" $.for $argument) }}
{{- end }}
{{- end }}
{{- else if $pool.engineArgs }}
{{- fail (printf "%s: engineArgs needs engine vllm" .for) }}
{{- end }}
{{- end }}

{{/* Refuses a cache that cannot be mounted by all pods of its model: (root, model). */}}
{{- define "diptych.checkCacheMode" -}}
{{- $mode := (.model.source.cacheVolume | default dict).accessMode | default "ReadWriteMany" }}
{{- if ne $mode "ReadWriteMany" }}
{{- $router := include "diptych.router" (dict "root" .root "model" .model) | fromYaml }}
{{- $counts := dict (printf "the router") (int (ternary $router.autoscaling.maxReplicas $router.replicas $router.autoscaling.enabled)) }}
{{- range $role := list "prefill" "decode" }}
{{- range (include "diptych.pools" (dict "root" $.root "role" $role "model" $.model.name) | fromYaml).pools }}
{{- $_ := set $counts (printf "%s pool %s" $role .name) (mul (int .rankHosts) (int (ternary .replicas .autoscaling.maxReplicas (eq .autoscaling.type "none")))) }}
{{- end }}
{{- end }}
{{- range $who, $count := $counts }}
{{- if gt (int $count) (ternary 0 1 (eq $mode "ReadWriteOncePod")) }}
{{- fail (printf "models.%s.source.cacheVolume.accessMode %s is for %s, but %s has up to %d: use ReadWriteMany; or, if all pods run on one node, create a claim and set cacheClaim" $.model.name $mode (ternary "one pod" "one node" (eq $mode "ReadWriteOncePod")) $who $count) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuses a disruption budget that blocks every eviction: (pdb, least, for). */}}
{{- define "diptych.checkBudget" -}}
{{- $none := false }}
{{- $key := ternary "minAvailable" "maxUnavailable" (hasKey .pdb "minAvailable") }}
{{- if and .pdb.enabled (gt (int .least) 0) }}
{{- if hasKey .pdb "minAvailable" }}
{{- $share := toString .pdb.minAvailable }}
{{- $needed := ternary (ceil (divf (mulf (trimSuffix "%" $share) .least) 100)) (float64 $share) (hasSuffix "%" $share) }}
{{- $none = ge (int $needed) (int .least) }}
{{- else }}
{{- $none = has (toString .pdb.maxUnavailable) (list "0" "0%") }}
{{- end }}
{{- end }}
{{- if $none }}
{{- fail (printf "%s: with %d pods, pdb.%s %v allows no eviction, so no node with one of them could ever be drained: set maxUnavailable 1, or pdb.enabled false" .for (int .least) $key (get .pdb $key)) }}
{{- end }}
{{- end }}

{{/* Checks that the schema cannot express. Rendered once, by the routers' template. */}}
{{- define "diptych.check" -}}
{{- range (include "diptych.models" (dict "root" $) | fromYaml).models }}
{{- if not (include "diptych.pools" (dict "root" $ "role" "decode" "model" .name) | fromYaml).pools }}
{{- fail (printf "model %s has no decode pool: add decode.pools.NAME.model=%s" .name .name) }}
{{- end }}
{{- if and (or (eq .source.type "image") (eq (.tokenizer | default dict).type "image")) (semverCompare "<1.33-0" $.Capabilities.KubeVersion.Version) }}
{{- fail (printf "model %s is an OCI image volume, which needs Kubernetes 1.33 (here %s); before 1.35 also the feature gate ImageVolume" .name $.Capabilities.KubeVersion.Version) }}
{{- end }}
{{- include "diptych.checkCacheMode" (dict "root" $ "model" .) }}
{{- end }}
{{- $nodePorts := dict }}
{{- range (include "diptych.routers" (dict "root" $) | fromYaml).routers }}
{{- include "diptych.checkService" (dict "service" .spec.service "for" .for) }}
{{- with .spec.service.nodePort | int | toString }}
{{- if and (ne . "0") (hasKey $nodePorts .) }}{{ fail (printf "service.nodePort %s is set for two routers: set models.NAME.router.service.nodePort, or sharedRouter.enabled" .) }}{{ end }}
{{- $_ := set $nodePorts . true }}
{{- end }}
{{- include "diptych.checkStrategy" (dict "spec" .spec "for" .for) }}
{{- include "diptych.checkStore" (dict "router" .spec "for" .for) }}
{{- include "diptych.checkPod" (dict "spec" .spec "for" .for) }}
{{- include "diptych.checkEnvironment" (dict "root" $ "spec" .spec "for" .for) }}
{{- include "diptych.checkResources" (dict "spec" .spec "for" .for) }}
{{- include "diptych.checkBudget" (dict "pdb" .spec.pdb "for" .for "least" (ternary .spec.autoscaling.minReplicas .spec.replicas .spec.autoscaling.enabled)) }}
{{- end }}
{{- include "diptych.checkShared" (dict "root" $) }}
{{- range $role := list "prefill" "decode" }}
{{- range (include "diptych.pools" (dict "root" $ "role" $role) | fromYaml).pools }}
{{- $for := printf "%s pool %s" $role .name }}
{{- include "diptych.checkStrategy" (dict "spec" . "for" $for) }}
{{- include "diptych.checkRankHosts" (dict "pool" . "for" $for) }}
{{- include "diptych.checkDevices" (dict "pool" . "for" $for) }}
{{- include "diptych.checkPod" (dict "spec" . "for" $for) }}
{{- include "diptych.checkEnvironment" (dict "root" $ "spec" . "for" $for) }}
{{- include "diptych.checkResources" (dict "spec" . "for" $for) }}
{{- include "diptych.checkSettings" (dict "root" $ "pool" . "for" $for) }}
{{- include "diptych.checkBudget" (dict "pdb" .pdb "for" $for "least" (ternary .replicas .autoscaling.minReplicas (eq .autoscaling.type "none"))) }}
{{- end }}
{{- end }}
{{- include "diptych.checkHostPorts" (dict "root" $) }}
{{- range (include "diptych.models" (dict "root" $) | fromYaml).models }}
{{- include "diptych.checkPairs" (dict "root" $ "model" .name) }}
{{- end }}
{{- with .Values.podDeletionCost }}
{{- if and .enabled .admissionPolicy }}
{{- include "diptych.requireAPI" (dict "root" $ "api" "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy" "for" "podDeletionCost.admissionPolicy, without which a worker could change every pod of the namespace,") }}
{{- end }}
{{- end }}
{{- if and .Values.monitoring.podMonitor.enabled .Values.monitoring.serviceMonitor.enabled }}
{{- fail "monitoring.podMonitor and monitoring.serviceMonitor are both enabled, so every pod would be scraped twice: disable one of them" }}
{{- end }}
{{- if and .Values.tls.certManager.enabled (not .Values.tls.certManager.issuerRef.name) }}
{{- fail "tls.certManager.enabled needs tls.certManager.issuerRef.name" }}
{{- end }}
{{- end }}

{{/* Refuses fields that the type of a Service does not have: (service, for). */}}
{{- define "diptych.checkService" -}}
{{- if and .service.loadBalancerSourceRanges (ne .service.type "LoadBalancer") }}
{{- fail (printf "%s: service.loadBalancerSourceRanges needs service.type LoadBalancer, not %s" .for .service.type) }}
{{- end }}
{{- if and .service.nodePort (eq .service.type "ClusterIP") }}
{{- fail (printf "%s: service.nodePort %d needs service.type NodePort or LoadBalancer" .for (int .service.nodePort)) }}
{{- end }}
{{- end }}

{{/* Refuses a response store with several routers, because they do not share stored responses: (router, for). */}}
{{- define "diptych.checkStore" -}}
{{- $store := .router.responseStore }}
{{- if ne $store.type "none" }}
{{- if or .router.autoscaling.enabled (gt (int .router.replicas) 1) }}
{{- fail (printf "%s: responseStore.type %s needs one replica and no autoscaling, because routers do not share stored responses" .for $store.type) }}
{{- end }}
{{- if and (eq $store.type "claim") (not $store.claimName) }}
{{- fail (printf "%s: responseStore.type claim needs responseStore.claimName" .for) }}
{{- end }}
{{- end }}
{{- end }}
