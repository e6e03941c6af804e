{{/* A TOML value. Integers stay integers, although Helm's YAML converts them to floats. */}}
{{- define "diptych.tomlValue" -}}
{{- if kindIs "float64" . }}
{{- if eq (floor .) . }}{{ int64 . }}{{ else }}{{ toString . }}{{ end }}
{{- else if or (kindIs "bool" .) (kindIs "int64" .) (kindIs "int" .) }}
{{- . }}
{{- else }}
{{- toJson . }}
{{- end }}
{{- end }}

{{/* A TOML section: (section, settings). */}}
{{- define "diptych.toml" -}}
[{{ .section }}]
{{- range $name := keys .settings | sortAlpha }}
{{ $name }} = {{ include "diptych.tomlValue" (index $.settings $name) }}
{{- end }}
{{- end }}

{{/* Mount path of a model. A shared router identifies models by folder name: (root, model). */}}
{{- define "diptych.modelFolder" -}}
{{- if include "diptych.isShared" . }}/models/{{ .model.name }}{{ else }}/models{{ end }}
{{- end }}

{{/* Value of the setting `model`: (root, model). */}}
{{- define "diptych.modelSetting" -}}
{{- if eq .model.source.type "hub" }}
{{- .model.source.id }}
{{- else if eq .model.source.type "path" }}
{{- trimSuffix "/" .model.source.path }}
{{- else }}
{{- printf "%s/%s" (include "diptych.modelFolder" .) (.model.source.path | default "") | trimSuffix "/" }}
{{- end }}
{{- end }}

{{/* Model name in workers and routers: its id, or the last part of its path without .gguf: (root, model). */}}
{{- define "diptych.modelId" -}}
{{- if eq .model.source.type "hub" }}{{ .model.source.id }}{{ else }}{{ base (include "diptych.modelSetting" .) | trimSuffix ".gguf" }}{{ end }}
{{- end }}

{{/* Encryption key settings, as YAML. Without keys, workers accept remote peers: (root, role). */}}
{{- define "diptych.curveSettings" -}}
{{- with .root.Values.curve }}
{{- if .existingSecret }}
curve_key: /etc/diptych/curve/{{ .key }}
{{- if .authorizedKey }}
curve_authorized: /etc/diptych/curve/{{ .authorizedKey }}
{{- end }}
{{- else if ne $.role "router" }}
allow_remote: true
{{- end }}
{{- end }}
{{- end }}

{{/* Settings of a pool's workers, as YAML. The chart's values take precedence over the user's: (root, role, pool). */}}
{{- define "diptych.workerSettings" -}}
{{- $model := include "diptych.model" (dict "root" .root "name" .pool.model "for" .pool.name) | fromYaml }}
{{- $settings := mustMergeOverwrite (dict "log_json" true) (mustDeepCopy .pool.settings) }}
{{- $_ := set $settings "model" (include "diptych.modelSetting" (dict "root" .root "model" $model)) }}
{{- $_ := set $settings "host" "::" }}
{{- $ports := include "diptych.ports" . | fromYaml }}
{{- $_ := set $settings "port" (int $ports.control) }}
{{- $_ := set $settings "http_port" (int $ports.http) }}
{{- $_ := set $settings "lend_port" (int $ports.lend) }}
{{- $_ := set $settings "device" (include "diptych.device" .pool.accelerator) }}
{{- $_ := set $settings "drain_timeout_s" (int .pool.drainSeconds) }}
{{- if eq .role "decode" }}
{{- $_ := set $settings "kv_port" (int $ports.kv) }}
{{- with $model.slo }}{{ if .tpotMs }}{{ $_ := set $settings "slo_tpot_ms" .tpotMs }}{{ end }}{{ end }}
{{- end }}
{{- if eq (.pool.engine | default "diptych") "vllm" }}
{{- $_ := set $settings "engine" "vllm" }}
{{- with .pool.engineArgs }}{{ $_ := set $settings "engine_args" . }}{{ end }}
{{- end }}
{{- if gt (int .pool.tensorParallelSize) 1 }}
{{- $_ := set $settings "tensor_parallel_size" (int .pool.tensorParallelSize) }}
{{- end }}
{{- if gt (int .pool.rankHosts) 1 }}
{{- $_ := set $settings "rank_hosts" (int .pool.rankHosts) }}
{{- $_ := set $settings "rank_port" (int $ports.ranks) }}
{{- end }}
{{- if .pool.kvDisk.enabled }}
{{- $_ := set $settings "kv_disk_path" "/var/lib/diptych/kv/blocks" }}
{{- $_ := set $settings "kv_disk_gib" (int .pool.kvDisk.gib) }}
{{- end }}
{{- if and .root.Values.podDeletionCost.enabled (eq (int .pool.rankHosts) 1) }}
{{- /* A LeaderWorkerSet removes the highest number. */}}
{{- $_ := set $settings "pod_deletion_cost" true }}
{{- end }}
{{- toYaml (mustMergeOverwrite $settings (include "diptych.curveSettings" . | fromYaml)) }}
{{- end }}

{{/* TOML section of the role to which a pool's workers may change, from the defaults of that role: (root, role, pool). */}}
{{- define "diptych.otherRole" -}}
{{- $other := ternary "decode" "prefill" (eq .role "prefill") }}
{{- $ports := include "diptych.ports" . | fromYaml }}
{{- $pool := mustMergeOverwrite (dict) (mustDeepCopy .root.Values.workers) (mustDeepCopy (index .root.Values $other).defaults) (dict "name" .pool.name "model" .pool.model "kvDisk" .pool.kvDisk "tensorParallelSize" .pool.tensorParallelSize "rankHosts" .pool.rankHosts "hostNetwork" .pool.hostNetwork "hostPort" (int $ports.control)) }}
{{- $settings := include "diptych.workerSettings" (dict "root" .root "role" $other "pool" $pool) | fromYaml }}
{{- include "diptych.toml" (dict "section" (printf "%s_worker" $other) "settings" $settings) }}
{{- end }}

{{/* "true" if workers of a prefill pool may decode and therefore also receive KV: (root). */}}
{{- define "diptych.prefillDecodes" -}}
{{- range (include "diptych.pools" (dict "root" .root "role" "prefill") | fromYaml).pools }}
{{- if .settings.role_change }}true{{ end }}
{{- end }}
{{- end }}

{{/* Settings of a router, one of `diptych.routers`, as YAML: (root, router). */}}
{{- define "diptych.routerSettings" -}}
{{- $root := .root }}
{{- $spec := .router.spec }}
{{- $settings := dict "log_json" true }}
{{- $waking := 0 }}
{{- range .router.models }}{{ $waking = max $waking (int (include "diptych.wakingSeconds" (dict "root" $root "model" .))) }}{{ end }}
{{- if $waking }}
{{- /* A request that wakes a pool waits for its first pod, and then runs as long as any other. */}}
{{- $_ := set $settings "queue_timeout_s" $waking }}
{{- $_ := set $settings "request_timeout_s" (add $waking 600) }}
{{- end }}
{{- $settings = mustMergeOverwrite $settings (mustDeepCopy $spec.settings) }}
{{- if gt (int64 $settings.queue_timeout_s) (int64 ($settings.request_timeout_s | default 600)) }}
{{- fail (printf "%s: settings.queue_timeout_s %v is above request_timeout_s %v, which includes the waiting time: raise the latter" .router.for $settings.queue_timeout_s ($settings.request_timeout_s | default 600)) }}
{{- end }}
{{- $_ := set $settings "host" "::" }}
{{- $_ := set $settings "port" 8000 }}
{{- $_ := set $settings "drain_timeout_s" (int $spec.drainSeconds) }}
{{- if .router.model }}
{{- $model := include "diptych.model" (dict "root" $root "name" .router.model "for" .router.for) | fromYaml }}
{{- $view := include "diptych.routerView" (dict "model" $model) | fromYaml }}
{{- $_ := set $settings "model" (include "diptych.modelSetting" (dict "root" $root "model" $view)) }}
{{- $_ := set $settings "served_model_name" (include "diptych.servedName" (dict "model" $model)) }}
{{- with $model.slo }}
{{- if .ttftMs }}{{ $_ := set $settings "slo_ttft_ms" .ttftMs }}{{ end }}
{{- if .tpotMs }}{{ $_ := set $settings "slo_tpot_ms" .tpotMs }}{{ end }}
{{- if .refuse }}{{ $_ := set $settings "slo_refuse" .refuse }}{{ end }}
{{- end }}
{{- else }}
{{- $_ := set $settings "models_file" "/etc/diptych/config/models.toml" }}
{{- end }}
{{- if include "diptych.adaptersFile" (dict "root" $root "models" .router.models) }}
{{- $_ := set $settings "lora_file" "/etc/diptych/config/adapters.toml" }}
{{- end }}
{{- $store := get (dict "none" "off" "memory" "memory") $spec.responseStore.type | default "/var/lib/diptych/responses.sqlite3" }}
{{- $_ := set $settings "response_store" $store }}
{{- $_ := set $settings "discovery" .root.Values.discovery.type }}
{{- if eq .root.Values.discovery.type "kubernetes" }}
{{- $_ := set $settings "discovery_namespace" .root.Release.Namespace }}
{{- end }}
{{- range $role := list "prefill" "decode" }}
{{- $services := list }}
{{- range (include "diptych.pools" (dict "root" $root "role" $role "model" $.router.model) | fromYaml).pools }}
{{- $service := include "diptych.objectName" (dict "root" $root "role" $role "name" .name) }}
{{- if eq $root.Values.discovery.type "dns" }}
{{- $service = printf "%s.%s.svc:%d" $service $root.Release.Namespace (int (include "diptych.ports" (dict "root" $root "role" $role "pool" .) | fromYaml).control) }}
{{- end }}
{{- $services = append $services $service }}
{{- end }}
{{- $_ := set $settings (printf "%s_services" $role) $services }}
{{- end }}
{{- range $name := .router.models }}
{{- $plan := include "diptych.planSettings" (dict "root" $root "model" $name) | fromYaml }}
{{- if $plan }}
{{- $_ := set $settings "planner" "kubernetes" }}
{{- range $role := list "prefill" "decode" }}
{{- $price := printf "price_%s" $role }}
{{- if and (hasKey $plan $price) (hasKey $settings $price) }}
{{- fail (printf "%s: settings.%s and autoscaling.price of the %s pool both set the price of a pod of model %s: use the latter" $.router.for $price $role $name) }}
{{- end }}
{{- end }}
{{- /* A router with several models reads these per model from its models file. */}}
{{- if $.router.model }}{{ $settings = mustMergeOverwrite $settings $plan }}{{ end }}
{{- end }}
{{- end }}
{{- with .root.Values.apiKeys }}
{{- if .existingSecret }}{{ $_ := set $settings "api_key_file" (printf "/etc/diptych/api-keys/%s" .key) }}{{ end }}
{{- end }}
{{- if include "diptych.tlsSecret" .root }}
{{- $_ := set $settings "tls_cert" "/etc/diptych/tls/tls.crt" }}
{{- $_ := set $settings "tls_key" "/etc/diptych/tls/tls.key" }}
{{- end }}
{{- toYaml (mustMergeOverwrite $settings (include "diptych.curveSettings" (dict "root" .root "role" "router") | fromYaml)) }}
{{- end }}

{{/* Pools of a model that its router scales, as YAML {pools: {role: {deployment, least, most, price}}}: (root, model). */}}
{{- define "diptych.planned" -}}
{{- $pools := dict }}
{{- range $role := list "prefill" "decode" }}
{{- $all := (include "diptych.pools" (dict "root" $.root "role" $role "model" $.model) | fromYaml).pools }}
{{- range $pool := $all }}
{{- if eq $pool.autoscaling.type "planner" }}
{{- if gt (len $all) 1 }}
{{- fail (printf "%s pool %s: model %s has several %s pools, and its router plans them as one; use autoscaling.type keda" $role $pool.name $.model $role) }}
{{- end }}
{{- $deployment := printf "%s%s" (ternary "leaderworkersets/" "" (gt (int $pool.rankHosts) 1)) (include "diptych.objectName" (dict "root" $.root "role" $role "name" $pool.name)) }}
{{- $_ := set $pools $role (dict "deployment" $deployment "least" (int $pool.autoscaling.minReplicas) "most" (int $pool.autoscaling.maxReplicas) "price" ($pool.autoscaling.price | default 1)) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and $pools (not (hasKey $pools "decode")) }}
{{- fail (printf "model %s: a prefill pool with autoscaling.type planner needs a decode pool with the same" $.model) }}
{{- end }}
{{- toYaml (dict "pools" $pools) }}
{{- end }}

{{/* Router settings for scaling a model's pools, as YAML; empty if it scales none: (root, model). */}}
{{- define "diptych.planSettings" -}}
{{- $settings := dict }}
{{- $pools := (include "diptych.planned" . | fromYaml).pools }}
{{- if $pools }}
{{- $_ := set $settings "planner_lease" (include "diptych.objectName" (dict "root" .root "role" "planner" "name" .model)) }}
{{- end }}
{{- range $role, $pool := $pools }}
{{- $_ := set $settings (printf "%s_deployment" $role) $pool.deployment }}
{{- $_ := set $settings (printf "min_%s" $role) (int $pool.least) }}
{{- $_ := set $settings (printf "max_%s" $role) (int $pool.most) }}
{{- /* 1 is the routers' default. If it is omitted, a price in router.settings still applies. */}}
{{- if ne (float64 $pool.price) 1.0 }}{{ $_ := set $settings (printf "price_%s" $role) $pool.price }}{{ end }}
{{- end }}
{{- toYaml $settings }}
{{- end }}

{{/* "true" if a router of the release sets replicas: (root). */}}
{{- define "diptych.plans" -}}
{{- range $model := (include "diptych.models" (dict "root" .root) | fromYaml).models }}
{{- if (include "diptych.planned" (dict "root" $.root "model" $model.name) | fromYaml).pools }}true{{ end }}
{{- end }}
{{- end }}

{{/* Value of the setting `device` for an accelerator. */}}
{{- define "diptych.device" -}}
{{- if .device }}
{{- .device }}
{{- else if eq .vendor "none" }}cpu
{{- else if has .vendor (list "nvidia" "amd") }}cuda
{{- else }}
{{- fail (printf "accelerator.vendor %s needs accelerator.device: its device name in the image's torch" .vendor) }}
{{- end }}
{{- end }}

{{/* Resource name of an accelerator. */}}
{{- define "diptych.acceleratorResource" -}}
{{- .resource | default (index (dict "nvidia" "nvidia.com/gpu" "amd" "amd.com/gpu" "intel" "gpu.intel.com/xe") .vendor) }}
{{- end }}
